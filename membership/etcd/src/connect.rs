//! How etcd is reached, and as whom.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::channel::Change;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::api;
use api::auth_client::AuthClient;
use api::cluster_client::ClusterClient;
use api::maintenance_client::MaintenanceClient;

/// Endpoints that a channel may learn before its connections take them in.
const ENDPOINTS_QUEUED_MAX: usize = 64;

/// Why a call gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{endpoint}`: {message}")]
    Endpoint { endpoint: String, message: String },
    /// etcd's or the connection's answer.
    #[error("{:?}: {}", .0.code(), .0.message())]
    Refused(#[from] Status),
    #[error("etcd has no such lease")]
    LeaseNotFound,
    #[error("etcd's token cannot be sent in a header")]
    Token,
    #[error("the stream ended")]
    StreamEnded,
}

impl Error {
    /// What gRPC calls it, where etcd or the connection said something.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(status) => Some(status.code()),
            _ => None,
        }
    }
}

/// A user of etcd's own authentication.
#[derive(Clone)]
pub struct Credentials {
    pub user: String,
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials {{ user: {:?}, password: .. }}", self.user)
    }
}

/// How to reach etcd.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub connect_timeout: Option<Duration>,
    /// For each call, until its answer (a stream's first words) begins.
    pub request_timeout: Option<Duration>,
    /// h2 pings on every connection: how often, and how long an answer may take.
    pub ping: Option<(Duration, Duration)>,
    /// Refuse to be answered by a member that sees no leader.
    pub require_leader: bool,
    pub credentials: Option<Credentials>,
    /// For endpoints that begin with `https://`; without it those have tonic's defaults.
    pub tls: Option<ClientTlsConfig>,
}

/// The token that the next call is sent with.
type Token = Arc<RwLock<Option<MetadataValue<Ascii>>>>;

/// Puts the token and the wish for a leader on every call.
#[derive(Clone, Debug)]
pub struct Headers {
    token: Token,
    require_leader: bool,
}

impl Interceptor for Headers {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let token = self.token.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(token) = &*token {
            request.metadata_mut().insert("token", token.clone());
        }
        if self.require_leader {
            let leader = MetadataValue::from_static("true");
            request.metadata_mut().insert("hasleader", leader);
        }
        Ok(request)
    }
}

/// What calls go through.
pub type Link = InterceptedService<Channel, Headers>;

/// A client; clones share its connections and its token.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
    headers: Headers,
    credentials: Option<Credentials>,
    /// Held while a token is asked for, so that many calls with an old one ask once.
    login: Arc<tokio::sync::Mutex<()>>,
}

impl Client {
    /// A client of the members at `endpoints`. Connections are made when they are needed;
    /// with credentials a token is asked for at once.
    ///
    /// # Errors
    /// An endpoint that is no URL, TLS that cannot be used, or etcd's refusal.
    pub async fn connect(endpoints: &[String], options: Options) -> Result<Self, Error> {
        let (channel, members) = Channel::balance_channel(ENDPOINTS_QUEUED_MAX);
        for text in endpoints {
            let endpoint = endpoint(text, &options).map_err(|error| Error::Endpoint {
                endpoint: text.clone(),
                message: error.to_string(),
            })?;
            let member = Change::Insert(text.clone(), endpoint);
            // The channel is here and has taken them all in before anybody calls.
            drop(members.send(member).await);
        }
        let client = Self {
            channel,
            headers: Headers {
                token: Token::default(),
                require_leader: options.require_leader,
            },
            credentials: options.credentials,
            login: Arc::default(),
        };
        client.log_in(None).await?;
        Ok(client)
    }

    pub(crate) fn link(&self) -> Link {
        Link::new(self.channel.clone(), self.headers.clone())
    }

    fn token(&self) -> Option<MetadataValue<Ascii>> {
        let token = self.headers.token.read();
        token.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks for a token in the place of `ended`, unless another call has done so meanwhile.
    async fn log_in(&self, ended: Option<MetadataValue<Ascii>>) -> Result<(), Error> {
        let Some(Credentials { user, password }) = self.credentials.clone() else {
            return Ok(());
        };
        let _one_at_a_time = self.login.lock().await;
        if self.token() != ended {
            return Ok(());
        }
        let asked = api::AuthenticateRequest {
            name: user,
            password,
        };
        // Without the token that has ended.
        let headers = Headers {
            token: Token::default(),
            ..self.headers.clone()
        };
        let link = Link::new(self.channel.clone(), headers);
        let answer = AuthClient::new(link).authenticate(asked).await?;
        let token = answer.into_inner().token;
        let token = token.parse().map_err(|_| Error::Token)?;
        let current = self.headers.token.write();
        *current.unwrap_or_else(PoisonError::into_inner) = Some(token);
        Ok(())
    }

    /// One call, and once more with a new token if etcd says that the token has ended.
    pub(crate) async fn call<Q: Clone, A, F>(
        &self,
        request: Q,
        send: impl Fn(Link, Q) -> F,
    ) -> Result<A, Error>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let used = self.token();
        let answer = match send(self.link(), request.clone()).await {
            Err(status) if status.code() == Code::Unauthenticated && self.credentials.is_some() => {
                self.log_in(used).await?;
                send(self.link(), request).await
            }
            answer => answer,
        };
        Ok(answer?.into_inner())
    }

    /// Users and roles.
    pub fn auth(&self) -> AuthClient<Link> {
        AuthClient::new(self.link())
    }

    /// The members of the cluster.
    pub fn cluster(&self) -> ClusterClient<Link> {
        ClusterClient::new(self.link())
    }

    /// The state of one member.
    pub fn maintenance(&self) -> MaintenanceClient<Link> {
        MaintenanceClient::new(self.link())
    }
}

fn endpoint(text: &str, options: &Options) -> Result<Endpoint, tonic::transport::Error> {
    let mut endpoint = Endpoint::from_shared(text.to_owned())?;
    if text.starts_with("https://") {
        endpoint = endpoint.tls_config(options.tls.clone().unwrap_or_default())?;
    }
    if let Some((interval, timeout)) = options.ping {
        endpoint = endpoint
            .keep_alive_while_idle(true)
            .http2_keep_alive_interval(interval)
            .keep_alive_timeout(timeout);
    }
    if let Some(timeout) = options.request_timeout {
        endpoint = endpoint.timeout(timeout);
    }
    if let Some(timeout) = options.connect_timeout {
        endpoint = endpoint.connect_timeout(timeout);
    }
    Ok(endpoint)
}
