"""Draft engines, which run the draft model, behind one protocol (`base.DraftEngine`)."""
