"""Files of a run directory, by which the processes of a cluster find and watch each other; TLS files; logs."""
