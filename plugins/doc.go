// Package plugins contains the discovery plugins, one program each. Its tests run each as hvdrun
// does, in a separate process.
package plugins
