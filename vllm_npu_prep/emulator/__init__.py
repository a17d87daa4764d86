"""An Ascend runtime emulated in software, for machines without one; the plugin never imports it."""
