// Package notifypb has the messages between a driver and the notification service of a worker.
package notifypb
