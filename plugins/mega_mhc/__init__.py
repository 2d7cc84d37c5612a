"""Hyper-connections: the mix of the residual streams around every sublayer."""

from plugins.mega_mhc.reference import HcMix, hc_advance, hc_collapse, hc_expand, hc_mix, mega_mhc

__all__ = ["HcMix", "hc_advance", "hc_collapse", "hc_expand", "hc_mix", "mega_mhc"]
