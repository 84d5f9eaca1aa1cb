package settings

import (
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// DefaultOrphan is the default of --orphan-timeout.
const DefaultOrphan = 10 * time.Minute

// OrphanTime is how long workers are kept whose driver is silent.
func (s *Settings) OrphanTime() time.Duration {
	if s.orphan == 0 {
		return DefaultOrphan
	}
	return s.orphan
}

// SSHSettings say how agents are started on other machines.
type SSHSettings struct {
	Port         int
	IdentityFile string
	Command      string // in place of ssh
	RemoteHvdrun string // on the hosts; empty: it is brought there
}

func sshText(field func(*SSHSettings) *string) func(*Settings, string) error {
	return text(func(s *Settings) *string { return field(&s.SSH) })
}

func setSSHPort(s *Settings, text string) (err error) {
	if s.SSH.Port, err = ParseCount(text, 1); err == nil && s.SSH.Port > 65535 {
		err = fmt.Errorf("%q is not a port", text)
	}
	return err
}

// setSSHCommand takes a command whose first word can be run.
func setSSHCommand(s *Settings, text string) error {
	words := strings.Fields(text)
	if len(words) == 0 {
		return fmt.Errorf("the value is empty")
	}
	if _, err := exec.LookPath(words[0]); err != nil {
		return fmt.Errorf("%s cannot be run: %w", words[0], err)
	}
	s.SSH.Command = text
	return nil
}
