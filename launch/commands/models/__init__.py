"""The commands on the models of this machine: pull, convert, list, rm."""
