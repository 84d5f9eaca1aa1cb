// Package inventory tests a discovery plugin in Python (inventory.py). Its tests run the plugin as
// hvdrun does.
package inventory
