package elastic

import (
	"context"
	"reflect"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/hvdrun/hvdrun/internal/logline"
)

// ownLog returns the log of this package, which is logrus's standard logger. If the program has not
// changed the logger's format, the lines of this package are formatted like those of hvdrun, among
// which they appear. The program's own lines keep the logger's format.
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

// ownLines is the context key that marks log lines of this package.
type ownLines struct{}

// besides is the program's formatter for all lines except those of this package.
type besides struct{ logrus.Formatter }

// Format formats the line.
func (b besides) Format(e *logrus.Entry) ([]byte, error) {
	if e.Context != nil && e.Context.Value(ownLines{}) != nil {
		return logline.Text{}.Format(e)
	}
	return b.Formatter.Format(e)
}

// untouched reports whether all exported fields of a formatter have their zero values, as logrus
// creates it.
func untouched(f *logrus.TextFormatter) bool {
	v := reflect.ValueOf(f).Elem()
	for i := range v.NumField() {
		if v.Type().Field(i).IsExported() && !v.Field(i).IsZero() {
			return false
		}
	}
	return true
}
