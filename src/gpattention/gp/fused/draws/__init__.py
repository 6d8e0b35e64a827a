"""Kernels that draw, each with its autograd function.

independent*     mean + spread * noise, one spread per token
item_keyed*      the same with item-keyed noise, made where it is used
per_channel*     with a variance per channel, for SGPA
noise*           item-keyed standard normal numbers
"""
