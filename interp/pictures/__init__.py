"""Figures of results. They need the extra `report`, so they are imported only when one is drawn."""
