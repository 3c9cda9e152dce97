"""The scaled product of many rows on sm_90; see its kernel."""
