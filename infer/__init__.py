"""The only place that decodes: canvas, observation, rules, and one loop."""
