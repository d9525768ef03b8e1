"""The supervisor's own endpoints: pages, lists, controls, and who may use them."""
