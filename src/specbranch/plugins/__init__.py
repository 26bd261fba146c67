"""The plugins through which target engines use the draft service. If it fails, the engine decodes without drafts."""
