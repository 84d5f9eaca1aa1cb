package plugin

const (
	CookieName      = cookieName
	CookieValue     = cookieValue
	ProtocolVersion = protocolVersion
)

// VersionError is a plugin of another version of the protocol.
type VersionError = versionError
