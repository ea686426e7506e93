"""Installing and checking: environments, doctor, kernel compilation."""
