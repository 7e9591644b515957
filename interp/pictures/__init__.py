"""Figures of results. They need the extra `report`."""
