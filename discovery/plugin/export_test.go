package plugin

const (
	CookieName      = cookieName
	CookieValue     = cookieValue
	ProtocolVersion = protocolVersion
)

// VersionError is the error for a plugin with another version of the protocol.
type VersionError = versionError
