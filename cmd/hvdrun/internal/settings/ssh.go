package settings

import (
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// DefaultOrphan is the default of --orphan-timeout.
const DefaultOrphan = 10 * time.Minute

// OrphanTime returns how long workers keep running without a message from their driver.
func (s *Settings) OrphanTime() time.Duration {
	if s.orphan == 0 {
		return DefaultOrphan
	}
	return s.orphan
}

// SSHSettings are the settings by which agents are started on other machines.
type SSHSettings struct {
	Port         int
	IdentityFile string
	Command      string // the command used instead of ssh
	RemoteHvdrun string // path of hvdrun on the hosts; empty: it is copied there
}

// setSSHCommand sets the command. It returns an error unless the first word can be executed.
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
