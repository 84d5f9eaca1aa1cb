package elastic

import (
	"context"
	"reflect"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/logline"
)

// ownLog returns the log of this package, which is logrus's standard logger. Where the program has
// left its format as it is, the lines of this package look like those of hvdrun, between which they
// stand; those of the program stay as they are.
func ownLog() logrus.FieldLogger {
	standard := logrus.StandardLogger()
	formatting.Lock() // a test may have several workers in one process
	defer formatting.Unlock()
	if f, is := standard.Formatter.(*logrus.TextFormatter); is && untouched(f) {
		standard.SetFormatter(besides{f})
	}
	return standard.WithContext(context.WithValue(context.Background(), ownLines{}, true))
}

// formatting guards the standard logger's format against other calls of ownLog.
var formatting sync.Mutex

// ownLines marks the lines of this package, in their context.
type ownLines struct{}

// besides is the program's format, but for the lines of this package.
type besides struct{ logrus.Formatter }

// Format returns the line.
func (b besides) Format(e *logrus.Entry) ([]byte, error) {
	if e.Context != nil && e.Context.Value(ownLines{}) != nil {
		return logline.Text{}.Format(e)
	}
	return b.Formatter.Format(e)
}

// untouched reports whether a format is as logrus has made it.
func untouched(f *logrus.TextFormatter) bool {
	v := reflect.ValueOf(f).Elem()
	for i := range v.NumField() {
		if v.Type().Field(i).IsExported() && !v.Field(i).IsZero() {
			return false
		}
	}
	return true
}
