"""Where target engines meet the draft service. One package per engine; nothing here may hold an engine up."""
