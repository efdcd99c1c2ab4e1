"""From a model and a configuration to the plan that every rank runs."""
