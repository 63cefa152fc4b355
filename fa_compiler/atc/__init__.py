"""A model as a folder that ATC compiles: the command `fa-compiler atc`.

`run.run` optimises a model for a product and lets one route write it: `routes.ROUTES` has a function for each. Beside
the model stand `atc.sh`, `report.json` and, if asked for, one JSON file for each distinct fused operator.
"""
