"""Routers: named policies over a view of the workers, built only from reports and the router's own placements."""
