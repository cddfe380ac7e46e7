"""The verbs: a conversion from its request to its report. Every process makes the same call."""
