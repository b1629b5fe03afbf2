"""The stream of training prompts and the selectors that draw from it."""
