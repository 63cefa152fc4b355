"""`python -m fa_compiler` is the command `fa-compiler`."""

import sys

from fa_compiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
