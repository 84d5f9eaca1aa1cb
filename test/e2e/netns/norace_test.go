//go:build netns && !race

package netns

var buildFlags []string
