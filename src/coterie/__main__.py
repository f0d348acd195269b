"""`python -m coterie` is the command line."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
