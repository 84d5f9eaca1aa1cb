package settings

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/cmd/hvdrun/internal/cli"
	"github.com/hvdrun/hvdrun/internal/safefile"
)

// LoggerAt returns the logger of a command that has no settings.
func LoggerAt(p *cli.Program, level logrus.Level) *logrus.Logger {
	return Logger(p, &Settings{OutputSettings: OutputSettings{LogLevel: level}})
}

// Logger returns a logger with the level and format of the settings.
func Logger(p *cli.Program, s *Settings) *logrus.Logger {
	log := logrus.New()
	log.SetOutput(cli.Lossy(p.Stderr))
	if p.Log != nil {
		log.SetOutput(p.Log)
		p.Log.OnDropped(func(n int) []byte {
			text, _ := log.Formatter.Format(&logrus.Entry{
				Logger: log, Time: time.Now(), Level: logrus.WarnLevel,
				Message: fmt.Sprintf("%d lines of the log dropped: nobody read them", n),
			})
			return text
		})
	}
	log.SetLevel(s.LogLevel)
	if s.logJSON {
		log.SetFormatter(&logrus.JSONFormatter{TimestampFormat: cli.TimeJSON})
		if s.RunID != "" {
			log.AddHook(cli.JobField(s.RunID))
		}
	} else {
		log.SetFormatter(cli.TextFormat(p.Env, p.Stderr))
	}
	safefile.TellLacks(func(text string) { log.Warn(text) })
	for _, text := range s.mistyped {
		log.Warn(text)
	}
	s.mistyped = nil
	return log
}
