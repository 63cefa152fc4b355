"""The command `fa-compiler`: `main` parses the command line and calls the function of a command
(main.py).

Each command has its file, or shares one. options.py adds the options of records, and render.py
prints reports on a terminal.
"""
