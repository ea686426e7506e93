"""Model families as data (ModelSpec, weight map) and one decoder written against the op set."""
