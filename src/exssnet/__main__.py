"""`python -m exssnet`."""

from exssnet.cli.main import main

if __name__ == "__main__":
    main()
