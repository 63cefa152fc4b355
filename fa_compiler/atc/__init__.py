"""A model as a folder that ATC compiles: the command `fa-compiler atc`.

`run.run` optimises a model for a product, and one route writes the result: `run.ROUTES` has a
function for each route. The folder also holds `atc.sh`, `report.json` and, on request, one JSON
file for each distinct fused operator.
"""
