"""The verbs: a conversion from its request to its report. All processes call these together."""
