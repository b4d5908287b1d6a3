"""A fleet of mocks on the wall clock: workers with doors of their own, and a router's door in front of them."""
