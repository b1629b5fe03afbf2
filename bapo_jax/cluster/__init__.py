"""Devices, hosts, and the mesh that splits a policy and its rows."""
