"""Settings of a rank, and the flags and configuration files that are made from them."""
