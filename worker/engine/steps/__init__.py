"""The step loop: a plan, its tokens through the model and the sampler, its results."""
