"""The plugins through which target engines use the draft service. None of them may delay its engine."""
