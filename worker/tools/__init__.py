"""Programs run as `python -m`: weight conversion, memory plan, step overhead."""
