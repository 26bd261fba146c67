"""Scenarios, simulation, reports: everything that measures or foresees speed."""
