// Package plugins contains the discovery plugins, one program each. Its tests run them as hvdrun
// does, as processes of their own.
package plugins
