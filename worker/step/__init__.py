"""Values and protocols between the step loop and a device."""
