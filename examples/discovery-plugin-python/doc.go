// Package inventory is a discovery plugin in Python (inventory.py). Its tests run it as hvdrun
// does.
package inventory
