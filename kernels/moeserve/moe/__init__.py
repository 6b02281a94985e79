"""The MoE layer below `layers/moe.py`: routing, oracle, dispatch, backends."""
