"""Parts of logitless.sample: the operator over the library, and sets of kept ids."""
