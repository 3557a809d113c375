"""`python -m ftkit`, which torchrun also takes: `torchrun ... -m ftkit finetune ...`."""

from ftkit.cli.app import main

if __name__ == "__main__":
    main()
