"""From the command line to objects: argv, Hydra composition, checks, run folders, sweeps."""
