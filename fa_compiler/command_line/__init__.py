"""The command `fa-compiler`: its commands, and how reports look on a terminal."""
