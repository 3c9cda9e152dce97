"""Projections that gather their rows through the routing, with the activation in the epilogue."""
