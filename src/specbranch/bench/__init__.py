"""Measure and forecast speed: benchmark scenarios, load tests, step times, timelines, and reports on them."""
