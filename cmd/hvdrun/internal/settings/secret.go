package settings

import (
	"maps"
	"regexp"
	"slices"
	"strings"
)

// keyed returns a map of words of the form NAME=value.
func keyed(words []string) map[string]string {
	m := map[string]string{}
	for _, w := range words {
		if name, value, ok := strings.Cut(w, "="); ok {
			m[strings.TrimSpace(name)] = value
		}
	}
	return m
}

// secretName matches a name whose value may be a secret, and secretURL a value that contains a
// password.
var (
	secretName = regexp.MustCompile(`(?i)(token|secret|passw|passphrase|credential|private|api_?key|access_?key|auth)`)
	secretURL  = regexp.MustCompile(`://[^/@\s]*:[^/@\s]*@`)
)

// isSecret reports whether a value may be a secret and must not be shown. The name of a file that
// contains a secret is not secret.
func isSecret(name, value string) bool {
	isFile := strings.HasSuffix(strings.ToLower(name), "file") || strings.HasSuffix(strings.ToLower(name), "path")
	return secretURL.MatchString(value) || secretName.MatchString(name) && !isFile
}

// ExposedSecrets returns the names of the secrets in a config file that everybody may read.
func (s *Settings) ExposedSecrets() []string {
	if !s.configExposed {
		return nil
	}
	held := keyed(s.Env)
	if from := s.Origins["discovery-config"]; !strings.HasPrefix(from, "--") && !strings.HasPrefix(from, "HVD_") {
		maps.Copy(held, s.PluginSettings)
	}
	_, secrets := withoutSecrets(held)
	return secrets
}

// withoutSecrets returns a copy of a map without the values that may be secrets, and the names of
// those.
func withoutSecrets(m map[string]string) (rest map[string]string, secrets []string) {
	rest = map[string]string{}
	for name, value := range m {
		if isSecret(name, value) {
			secrets = append(secrets, name)
		} else {
			rest[name] = value
		}
	}
	slices.Sort(secrets)
	return rest, secrets
}
