"""PTX wrapped for the kernels: the only place with inline assembly."""
